"""Settings chosen on public prompts, at no privacy cost."""
