"""What a run says: on the terminal, in its log file and its summary, without secrets."""
