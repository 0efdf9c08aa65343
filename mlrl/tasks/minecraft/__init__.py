"""What the tasks strbuild and housebuild share: commands, worlds, targets. No game server takes part."""
