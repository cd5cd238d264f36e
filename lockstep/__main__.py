"""`lockstep COMMAND`, also `python -m lockstep COMMAND`: the commands are those of the pipeline."""

import sys
from importlib import import_module
from importlib.util import find_spec


def main() -> None:
    """Run a command of `lockstep`, which the pipeline has.

    In a checkout `pipeline` lies beside this folder, once installed in it. It is imported by name,
    so that nothing of the library depends on it.
    """
    inside = find_spec("lockstep.pipeline") is not None
    if not inside and find_spec("pipeline") is None:
        sys.exit(
            "lockstep: pipeline is missing, expected beside this library, which has no command"
        )
    pipeline = "lockstep.pipeline" if inside else "pipeline"
    import_module(f"{pipeline}.stage.signals").end_on_request()  # first: the rest takes a moment
    import_module(f"{pipeline}.__main__").main()


if __name__ == "__main__":
    main()
