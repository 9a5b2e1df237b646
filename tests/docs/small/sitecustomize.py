"""Python imports this at its start in the commands that tests/docs/run.py executes."""

if __name__ == "sitecustomize":
    from tests.docs.small_pipelines import install

    install()
