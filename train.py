"""Train, validate or export a policy: ``python train.py algorithm=dapo rollout.group_size=8 seed=1``."""

import sys

if __name__ == "__main__":  # worker processes of rewards import this file, too, and start nothing
    if not sys.flags.safe_path:
        # Python would look for every module here first, such as datasets in a folder that was unpacked here.
        here = sys.path.pop(0)
        from importlib.util import module_from_spec, spec_from_file_location

        if spec := spec_from_file_location("grpo_lightning", f"{here}/grpo_lightning/__init__.py"):
            sys.modules[spec.name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[spec.name])

    from grpo_lightning.composition import main

    main()
