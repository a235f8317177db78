#!/usr/bin/env bash
# Stop what start.sh started in RUNDIR, and the jobs it ran: by recorded pid and start time, nothing by name.
#   stop.sh RUNDIR          all of it
#   stop.sh RUNDIR NAME     one daemon, such as slurmctld, and no job
set -uo pipefail
run=$(cd "$1" && pwd -P) || exit 0
[ -s "$run/pids" ] || exit 0
export SLURM_CONF="$run/slurm.conf" PATH=/usr/sbin:/usr/bin:/sbin:/bin

alive() { # pid, start time: not another process of that number, and no zombie
    read -r state start < <(cut -d')' -f2 "/proc/$1/stat" 2>/dev/null | awk '{print $1, $20}')
    [ "${start:-}" = "$2" ] && [ "$state" != Z ]
}
end() { # name pid start
    alive "$2" "$3" || return 0
    kill -TERM "$2" 2>/dev/null
    for _ in $(seq 50); do alive "$2" "$3" || return 0; sleep 0.1; done
    echo "stop.sh: $1 $2 needed KILL" >&2
    kill -KILL "$2"
}

if [ $# -gt 1 ]; then
    while read -r name pid start; do [ "$name" != "$2" ] || end "$name" "$pid" "$start"; done <"$run/pids"
    exit 0
fi

# Jobs first: their steps and processes outlive slurmd otherwise.
if timeout 3 scontrol ping >/dev/null 2>&1; then
    ids=$(timeout 5 squeue -h -o %A | sort -u)
    # shellcheck disable=SC2086 # numbers, one word each
    [ -z "$ids" ] || { timeout 5 scancel --full --signal=KILL $ids; timeout 5 scancel $ids; } 2>/dev/null
    for _ in $(seq 60); do [ -z "$(timeout 5 squeue -h -t R,CG,S -o %A)" ] && break || sleep 0.1; done
fi
tac "$run/pids" | while read -r name pid start; do end "$name" "$pid" "$start"; done
# What outlived its job has this cluster's SLURM_CONF and a SLURM_JOB_ID in its environment, or is one of its slurmstepd.
for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    environment=$(tr '\0' '\n' 2>/dev/null <"$folder/environ") || continue
    grep -qxF "SLURM_CONF=$SLURM_CONF" <<<"$environment" || continue
    command=$(tr '\0' ' ' 2>/dev/null <"$folder/cmdline")
    if grep -q '^SLURM_JOB_ID=' <<<"$environment" || [[ $command == slurmstepd:* ]]; then
        echo "stop.sh: killing what was left: $pid $command" >&2
        kill -KILL "$pid" 2>/dev/null
    fi
done
rm -f "$run/pids"
