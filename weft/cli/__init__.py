"""The front door: one file a verb, each loaded only when it is called."""
