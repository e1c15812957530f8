#!/usr/bin/env bash
# The restart policy, sourced by every launcher that restarts processes itself. The processes of a job start together
# and end together, because none can go on alone; what to do next follows from all their exit codes:
#
#   0          done
#   75         preempted (SIGTERM): its state is saved
#   76         it lost another process of the job
#   134        the same, noticed by jax, which aborts (SIGABRT); also where another process did not come at the start
#   130        interrupted (Ctrl-C)
#   137, 143   killed: by SIGKILL (memory ran out, a machine was lost), or by SIGTERM before it could save
#   others     a mistake in the settings or in the program, which would only be repeated
#
# One of the others ends the job with that code. Otherwise all are started again, and go on from the last checkpoint, at
# most TANGO_MAX_RESTARTS times (20).

max_restarts=${TANGO_MAX_RESTARTS:-20}
[[ $max_restarts =~ ^[0-9]+$ ]] || {
    echo "tango_jax: error: TANGO_MAX_RESTARTS=$max_restarts is no whole number: set it to 0 or more" >&2
    exit 2
}
restarts=0
stopping=     # set by a launcher that was itself asked to end
exit_codes=() # of the last attempt, by process

# describe_exit CODE: in words.
describe_exit() {
    case $1 in
        0) echo "done" ;;
        75) echo "preempted, its state is saved" ;;
        76) echo "it lost another process of the job" ;;
        130) echo "interrupted (Ctrl-C)" ;;
        134) echo "aborted, as jax does when another process falls silent or does not come" ;;
        137) echo "killed; if nobody did it, memory may have run out" ;;
        143) echo "ended by SIGTERM before it could save" ;;
        *) echo "a mistake in the settings or in the program, see its output" ;;
    esac
}

# judge CODE...: what the exit codes of all processes mean together: done, preempted, restart or stop.
judge() {
    local code verdict="done"
    for code in "$@"; do
        case $code in
            0) ;;
            75) [[ $verdict == "done" ]] && verdict=preempted ;;
            76 | 134 | 137 | 143) verdict=restart ;;
            *) echo stop && return ;;
        esac
    done
    echo "$verdict"
}

# worst_of CODE...: the code that the job ends with: that of a mistake, else the largest.
worst_of() {
    local code worst=0
    for code in "$@"; do
        [[ $(judge "$code") == stop ]] && worst=$code && break
        ((code > worst)) && worst=$code
    done
    echo "$worst"
}

# supervise ATTEMPT...: run ATTEMPT, which starts every process, waits for all of them and fills exit_codes, until the
# job is done, made a mistake, or was restarted too often. It does not return.
supervise() {
    local code
    while true; do
        exit_codes=()
        "$@"
        code=$(worst_of "${exit_codes[@]}")
        case $(judge "${exit_codes[@]}") in
            "done") exit 0 ;;
            stop)
                say "exit code $code: $(describe_exit "$code"). Not restarted"
                exit "$code"
                ;;
        esac
        if [[ -n $stopping ]]; then
            say "ended as asked; the same command goes on where this one stopped"
            exit 75
        fi
        if ((restarts >= max_restarts)); then
            say "exit code $code: $(describe_exit "$code"). Not restarted: that was done $restarts times already" \
                "(TANGO_MAX_RESTARTS=$max_restarts)"
            exit "$code"
        fi
        restarts=$((restarts + 1))
        say "restarting all processes ($restarts of at most $max_restarts times)"
    done
}
