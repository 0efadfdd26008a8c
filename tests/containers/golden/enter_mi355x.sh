export AGENTRL_ROLE_MARK=$SLURM_JOB_ID.$SLURM_STEP_ID.$SLURMD_NODENAME
trap "" USR2 TERM
home="/tmp/agentrl-$USER"
if ! mkdir -p -m 700 "$home" || ! [[ -O $home ]]; then
    echo "scratch $home on $HOSTNAME: not a folder of yours; set cluster.scratch" >&2
    exit 2
fi
image=/project/images/agentrl-rocm.sif
if [[ $(stat -Lc %s "$image") != 31457280000 ]]; then
    echo "image $image on $HOSTNAME: not the file that this job was queued with" >&2
    exit 2
fi
fuse=$home/.fuse real=$(type -P squashfuse_ll)
if [[ $real ]] && mkdir -p "$fuse"; then
    printf '#!/bin/sh\ntrap "" USR2 TERM\nexec %q "$@"\n' "$real" >"$fuse/.$$"
    chmod +x "$fuse/.$$" && mv "$fuse/.$$" "$fuse/squashfuse_ll" && PATH=$fuse:$PATH
fi
crosses=('SLURM_.*' SLURMD_NODENAME 'AGENTRL_.*' PYTHONSAFEPATH '(ROCR|HIP|CUDA)_VISIBLE_DEVICES'
    GPU_DEVICE_ORDINAL '(NCCL|RCCL|GLOO|UCX)_.*' 'FI_.*' 'HSA_.*' 'HIP_.*' 'MIOPEN_.*'
    '(OMP|MKL)_NUM_THREADS' '(HF|WANDB|E2B)_.*' '(http|https|no)_proxy' 'USER|TZ' MY_SITE)
for name in $(compgen -e); do
    for pattern in "${crosses[@]}"; do
        [[ $name =~ ^($pattern)$ ]] && export "APPTAINERENV_$name=${!name}"
    done
done
exec apptainer exec --cleanenv --rocm --no-mount=home,cwd --home="$home" \
    --pwd=/project/runs/qwen3 --env=PYTHONNOUSERSITE=1 --bind=/project/runs/qwen3 \
    --bind=/project/models/Qwen3-8B --bind=/scratch --bind=/dev/shm:/dev/shm \
    /project/images/agentrl-rocm.sif bash -c 'trap "" USR2 TERM; exec "$@"' role "$@"
