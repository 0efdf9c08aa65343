"""Preferences between joint responses: pairs, their replay, who the comparators are, and the joint reward model."""
