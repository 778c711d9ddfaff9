"""The serving application, and its version, which is written in `pyproject.toml` alone."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("folio-serve")
except PackageNotFoundError:  # the source is on the path, as in a `working_dir` of Ray's, and nothing is installed
    VERSION = "0+unknown"
