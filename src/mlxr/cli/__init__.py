"""The command line: a table of commands, one file each; nothing heavy is imported until a command runs."""
