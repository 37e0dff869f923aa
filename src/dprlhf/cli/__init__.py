"""The command line; ``app.py`` lists the commands."""
