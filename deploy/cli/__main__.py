"""`python -m deploy.cli` is `forebay`."""

from deploy.cli.app import main

main()
