"""Doctor: what a GPU machine does, measured part by part, each in processes that may die."""
