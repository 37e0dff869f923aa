"""The users' rows: read from files, the hub or memory, and grouped by user."""
