"use strict";
// Before the page is drawn: the colours that were chosen last time.
document.documentElement.dataset.theme = localStorage.getItem("folio-theme") || "auto";
