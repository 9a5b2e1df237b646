"""Doctor: measure and check a GPU machine, one suite of checks at a time, in processes that may die."""
