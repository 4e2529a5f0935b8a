"""What a person at the terminal sees and presses: the first line, progress bars, and Ctrl-C."""
