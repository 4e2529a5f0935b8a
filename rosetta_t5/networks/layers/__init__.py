"""The layers that all networks share."""
