"""Lets `python -m dmesh` do what `dmesh` does."""

import sys

from dmesh.cli import main

sys.exit(main())
