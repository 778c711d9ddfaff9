"""`python -m app.cli` is `folio`, where the script is not installed."""

import sys

from app.cli.main import main

sys.exit(main())
