#!/bin/bash
# What an executor's pod does before SIGTERM (its preStop hook, by spark.decommission.enabled): all ranks of the run
# write a checkpoint, and those of this pod end. The pod's terminationGracePeriodSeconds bounds the time for it.
set -u

# The Spark tasks that supervise this pod's ranks: each is the parent of its rank.
supervisors() {
    local folder
    for folder in /proc/[0-9]*; do
        if tr '\0' ' ' <"$folder/cmdline" 2>/dev/null | grep -q -- '-m lockstep\.training\.rank'; then
            sed -n 's/^PPid:[[:space:]]*//p' "$folder/status" 2>/dev/null
        fi
    done | sort -u
}

java=$(pgrep -o -x java) || exit 0
kill -PWR "$java" # Spark gives this executor no more tasks, and ends it after its last one
for task in $(supervisors); do
    kill -TERM "$task"
done
while kill -0 "$java" 2>/dev/null; do
    sleep 0.2
done
