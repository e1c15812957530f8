"""Rewards, advantages, losses and schedules of the reinforcement-learning stage."""
