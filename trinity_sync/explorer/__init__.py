"""The rollout replicas: engines that generate samples, the actor around one, and the pool of all of them."""
