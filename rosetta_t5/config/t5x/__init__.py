"""What T5X's gin files expect: its paths, its run functions in `__main__`, its retired arguments."""
