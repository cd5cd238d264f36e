"""`lockstep COMMAND`, also `python -m lockstep COMMAND`."""

from pipeline.__main__ import main

if __name__ == "__main__":
    main()
