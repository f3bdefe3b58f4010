"""Trinity-RFT workflows: a `Workflow` gets a `Task` and a `ModelWrapper`, and returns experiences.

Names and configuration keys follow its public guides: only the imports of a workflow change.
"""
