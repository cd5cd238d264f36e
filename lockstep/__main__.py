"""`lockstep COMMAND`, also `python -m lockstep COMMAND`."""

from pipeline.stage import signals

signals.end_on_request()  # first: the other imports take a moment

from pipeline.__main__ import main  # noqa: E402

if __name__ == "__main__":
    main()
