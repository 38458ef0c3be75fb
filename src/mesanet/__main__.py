"""`python -m mesanet` is the command `mesanet`."""

from mesanet.cli import main

if __name__ == "__main__":
    main()
