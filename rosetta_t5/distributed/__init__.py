"""The processes of one run: launch, rendezvous, preflight, signals, watchdog."""
