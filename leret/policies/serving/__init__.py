"""Real LM servers for trained policies: the command, the process, and the wait until it answers."""
