"""Start and supervise ranks: a pool on this machine, a script on several, launchers of several machines."""
