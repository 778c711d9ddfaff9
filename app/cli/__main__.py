"""`python -m folio.app.cli` is `folio`, where the script is not installed."""

import sys

from folio.app.cli.main import main

sys.exit(main())
