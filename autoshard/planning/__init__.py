"""From a graph, a mesh and demands to a plan."""
