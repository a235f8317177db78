#!/usr/bin/env bash
# Start a throw-away Slurm cluster by hand: no systemd, loopback only, as root, own munge, own ports.
#   start.sh RUNDIR          one controller and two nodes of two CPUs each; RUNDIR/env.sh points Slurm's commands at it
#   start.sh RUNDIR again    the controller alone, with the state it left
# RUNDIR/pids has what was started, name, pid and start time: stop.sh ends that and nothing else.
set -euo pipefail
run=$(mkdir -p "$1" && cd "$1" && pwd -P)
export PATH=/usr/sbin:/usr/bin:/sbin:/bin SLURM_CONF="$run/slurm.conf"

started() { echo "$1 $2 $(cut -d')' -f2 <"/proc/$2/stat" | awk '{print $20}')" >>"$run/pids"; }
fail() {
    echo "start.sh: $1" >&2
    tail -n 20 "$run"/log/* >&2 || true
    "$(dirname "$0")/stop.sh" "$run" >&2 || true
    exit 1
}
controller() {
    slurmctld -D -f "$SLURM_CONF" "$@" </dev/null >>"$run/log/slurmctld.out" 2>&1 &
    started slurmctld $!
}
idle_nodes() { # whatever they do, as long as they answer
    for _ in $(seq 300); do
        [ "$(sinfo -h -N -p main -t idle,alloc,mix,comp -o %N 2>/dev/null | sort -u | wc -l)" = 2 ] && return
        sleep 0.1
    done
    fail "the nodes did not come up in 30 s"
}

if [ "${2:-}" = again ]; then
    controller
    idle_nodes
    exit 0
fi

[ "$(id -u)" = 0 ] || { echo "start.sh: needs root" >&2; exit 2; }
[ ! -e "$run/pids" ] || { echo "start.sh: $run has a cluster already" >&2; exit 2; }
mkdir -p "$run"/{state,log,munge,spool/n1,spool/n2}
chmod 0755 "$run" "$run"/{state,log,spool}
chmod 0711 "$run/munge"
: >"$run/pids"
base=$(python3 - <<'PY'
import random, socket, sys

for _ in range(200):
    base = random.randint(20000, 31000)  # below the ephemeral range
    sockets = [socket.socket() for _ in range(3)]
    try:
        for i, one in enumerate(sockets):
            one.bind(("127.0.0.1", base + i))
    except OSError:
        continue
    finally:
        for one in sockets:
            one.close()
    print(base)
    break
else:
    sys.exit("no three free ports in a row")
PY
)
(umask 077 && head -c 1024 /dev/urandom >"$run/munge/key")
: >"$run/plugstack.conf"
# 22.05 has no CgroupPlugin=disabled; cgroup/v1 loads without touching anything while no plugin uses cgroups
printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >"$run/cgroup.conf"
cat >"$SLURM_CONF" <<CONF
ClusterName=kvcert
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$base
SlurmctldAddr=127.0.0.1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$run/munge/sock
CommunicationParameters=NoAddrCache,NoInAddrAny,NoCtldInAddrAny
SlurmctldPidFile=$run/slurmctld.pid
SlurmdPidFile=$run/slurmd-%n.pid
StateSaveLocation=$run/state
SlurmdSpoolDir=$run/spool/%n
SlurmctldLogFile=$run/log/slurmctld.log
SlurmdLogFile=$run/log/slurmd-%n.log
PlugStackConfig=$run/plugstack.conf
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=1
MpiDefault=none
SwitchType=switch/none
MinJobAge=600
KillWait=2
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=30
MaxArraySize=4
MailProg=/bin/true
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((base + 1)) CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((base + 2)) CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 DefaultTime=10 State=UP PriorityTier=1 LLN=YES
PartitionName=urgent Nodes=n1,n2 MaxTime=60 DefaultTime=10 State=UP PriorityTier=10 PreemptMode=OFF
CONF
echo "export SLURM_CONF='$SLURM_CONF' PATH=\"\$PATH:/usr/sbin\"" >"$run/env.sh"

munged --foreground --force --key-file="$run/munge/key" --socket="$run/munge/sock" --pid-file="$run/munge/pid" \
    --seed-file="$run/munge/seed" --log-file="$run/munge/log" --num-threads=2 </dev/null >"$run/log/munged.out" 2>&1 &
started munged $!
for _ in $(seq 100); do munge -S "$run/munge/sock" -n >/dev/null 2>&1 && break || sleep 0.05; done
munge -S "$run/munge/sock" -n | unmunge -S "$run/munge/sock" >/dev/null || fail "munge does not answer"
controller -c
for node in n1 n2; do
    slurmd -D -N $node -f "$SLURM_CONF" </dev/null >"$run/log/slurmd-$node.out" 2>&1 &
    started slurmd-$node $!
done
idle_nodes
