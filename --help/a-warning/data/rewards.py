
import logging, os, sys, warnings

def careless(prompts, completions, note=None, **columns):
    print("scoring", prompts, note)
    print("scoring", prompts, file=sys.stderr)
    os.write(1, repr(prompts).encode())
    os.write(2, repr(note).encode())
    warnings.warn(f"odd prompts {prompts}")
    logging.getLogger("mine").error("odd prompts %s", prompts)
    if any(p.endswith(" 3") for p in prompts):
        raise ValueError(f"cannot score {prompts}")
    return [1.61803398875] * len(prompts)
