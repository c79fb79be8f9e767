"""What faces the outside: the command line and its interactive chat."""
