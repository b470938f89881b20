"""What actors tell of themselves: named events, turned into log lines, spans and metrics outside of the algorithms."""
