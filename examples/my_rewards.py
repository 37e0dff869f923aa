"""A reward is a function with TRL's signature: one number for each completion, larger is better."""


def brevity(prompts, completions, **columns):
    """Prefer short answers: +3 for an empty one, -3 (where scores are clipped) at 300 bytes."""
    return [3 - len(text.encode()) / 50 for text in completions]
