"""A reward is a function with TRL's signature: one number for each completion, larger is better."""


def brevity(prompts, completions, **columns):
    """Prefer short answers."""
    return [-len(text.encode()) / 10 for text in completions]
