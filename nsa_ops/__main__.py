"""`python -m nsa_ops` is the `nsa-ops` command."""

from nsa_ops.cli.app import main

if __name__ == "__main__":
    main()
