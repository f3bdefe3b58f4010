"""Trinity-RFT's form of a rollout: a `Workflow` gets a `Task` and a `ModelWrapper`, and returns experiences.

Names and configuration keys follow its public guides, so that a workflow moves over by changing its imports.
"""
