"""Several replicas of a model behind one address: the choice of a replica for each request, and running them.

`router` chooses; it uses neither network nor processes, and learns of the replicas from the reports it is given.
"""
