"""The command line: arguments and a config file in; a checked configuration and a session around the work out."""
