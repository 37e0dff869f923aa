"""Private users and public prompts, read from files, data sets and memory."""
