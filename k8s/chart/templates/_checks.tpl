{{/* Refuses values that contradict one another; values.schema.json has refused those that are wrong by themselves. */}}
{{- define "raydix.checks" -}}
{{- $v := .Values }}
{{- $roles := (include "raydix.roles" . | fromJson).roles }}
{{- if gt (len .Release.Name) 41 }}
{{- fail (printf "the release's name %q has more than the 41 characters that KubeRay takes" .Release.Name) }}
{{- end }}
{{- if ne $v.pools.prefill.enabled $v.pools.decode.enabled }}
{{- fail "pools.prefill and pools.decode belong together: enable both, or mixed" }}
{{- end }}
{{- if not $roles }}
{{- fail "no workers: enable pools.prefill and pools.decode, pools.mixed, or pools.elastic" }}
{{- end }}
{{- if and (gt (len $roles) 1) $v.pools.elastic.enabled (eq (int $v.pools.elastic.replicas.min) 0) }}
{{- fail "pools.elastic.replicas.min is 0, which needs all workers to be elastic: disable the other pools" }}
{{- end }}
{{- range $role := $roles }}
{{- include "raydix.checkPool" (dict "root" $ "role" $role "pool" (index $v.pools $role)) }}
{{- end }}
{{- range $role := concat (list "head" "ingress") $roles }}
{{- include "raydix.checkPod" (dict "root" $ "role" $role "pool" (ternary $v.head (get $v.pools $role) (eq $role "head"))) }}
{{- end }}
{{- include "raydix.checkIngress" . }}
{{- include "raydix.checkVolumes" . }}
{{- include "raydix.checkUpgrade" . }}
{{- include "raydix.checkHttp" . }}
{{- include "raydix.checkOverrides" . }}
{{- end }}

{{/* The pool's store holds what the configuration puts there, the pod's memory the store and the worker. */}}
{{- define "raydix.checkPool" -}}
{{- $v := .root.Values }}
{{- $name := printf "pools.%s" .role }}
{{- $stored := addf (float64 $v.cache.segmentGib) (float64 $v.cache.swapGib) }}
{{- if le (float64 .pool.storeGib) $stored }}
{{- fail (printf "%s.storeGib is %v and must be above %v: cache.segmentGib (%v) and cache.swapGib (%v) lie there" $name .pool.storeGib $stored $v.cache.segmentGib $v.cache.swapGib) }}
{{- end }}
{{- $shm := float64 (include "raydix.shmGib" .pool.storeGib) }}
{{- $pool := ternary 0.0 (float64 $v.cache.poolGib) (gt (int .pool.gpus) 0) }}
{{- $needed := addf $shm $pool (float64 $v.model.gib) 2.0 }}
{{- if lt (float64 .pool.memoryGib) $needed }}
{{- fail (printf "%s.memoryGib is %v and must be at least %v: %v for /dev/shm (storeGib and a tenth), %v for the KV pool (cache.poolGib, on CPUs), %v for weights (model.gib), 2 for Ray" $name .pool.memoryGib $needed $shm $pool $v.model.gib) }}
{{- end }}
{{- $numbers := include "raydix.numbers" .pool | fromJson }}
{{- if gt (int $numbers.min) (int $numbers.max) }}
{{- fail (printf "%s.replicas: min is %v and max is %v" $name $numbers.min $numbers.max) }}
{{- end }}
{{- if gt (int $numbers.max) (int .pool.pods.max) }}
{{- $key := ternary "replicas.max" "replicas" (kindIs "map" .pool.replicas) }}
{{- fail (printf "%s.%s is %v and pods.max is %v: each worker has a pod of its own" $name $key $numbers.max .pool.pods.max) }}
{{- end }}
{{- if gt (int .pool.gpus) 1 }}
{{- fail (printf "%s.gpus is %v and may be at most 1: a worker computes on one GPU (there is no tensor parallelism), and the others would stand idle; raise replicas and pods.max instead" $name .pool.gpus) }}
{{- end }}
{{- if gt (int .pool.pods.min) (int .pool.pods.max) }}
{{- fail (printf "%s.pods: min is %v and max is %v" $name .pool.pods.min .pool.pods.max) }}
{{- end }}
{{- if and (gt (int .pool.gpus) 0) (lt (int .pool.cpu) 2) }}
{{- fail (printf "%s.cpu is %v and must be at least 2 beside a GPU" $name .pool.cpu) }}
{{- end }}
{{- end }}

{{/* What pods are given besides has names of its own: Kubernetes would take the second of two, or refuse the pod. */}}
{{- define "raydix.checkPod" -}}
{{- $given := include "raydix.podValues" . | fromJson }}
{{- $lists := dict "env" "raydix.env" "volumes" "raydix.volumes" }}
{{- range $key, $template := $lists }}
{{- $names := list }}
{{- range include $template $ | fromYamlArray }}{{ $names = append $names .name }}{{ end }}
{{- range get $given $key }}
{{- if has .name $names }}
{{- fail (printf "pod.%s of %s: %q is there already" $key $.role .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- end }}
{{- end }}

{{- define "raydix.checkIngress" -}}
{{- $v := .Values }}
{{- $pool := $v.pools.ingress }}
{{- $room := mulf (float64 $pool.pods.max) (float64 $pool.cpu) }}
{{- $wanted := mulf (float64 $pool.replicas.max) (float64 $pool.replicaCpu) | addf (float64 $pool.managerCpu) }}
{{- if lt $room $wanted }}
{{- fail (printf "pools.ingress: replicas.max times replicaCpu, and managerCpu, are %v CPUs, and pods.max times cpu is %v" $wanted $room) }}
{{- end }}
{{- if lt (float64 $pool.cpu) (max (float64 $pool.managerCpu) (float64 $pool.replicaCpu) | float64) }}
{{- fail (printf "pools.ingress.cpu is %v, below managerCpu (%v) or replicaCpu (%v)" $pool.cpu $pool.managerCpu $pool.replicaCpu) }}
{{- end }}
{{- if or (gt (int $pool.replicas.min) (int $pool.replicas.max)) (gt (int $pool.pods.min) (int $pool.pods.max)) }}
{{- fail "pools.ingress: a min is above its max" }}
{{- end }}
{{- $needed := addf (float64 (include "raydix.shmGib" $pool.storeGib)) 2.0 }}
{{- if lt (float64 $pool.memoryGib) $needed }}
{{- fail (printf "pools.ingress.memoryGib is %v and must be at least %v: /dev/shm (storeGib and a tenth), and 2 for Ray" $pool.memoryGib $needed) }}
{{- end }}
{{- if and $v.cache.diskGib (le (float64 $pool.storeGib) (float64 $v.cache.segmentGib)) }}
{{- fail (printf "pools.ingress.storeGib is %v and must be above cache.segmentGib (%v): what the manager reads from its disk lies there" $pool.storeGib $v.cache.segmentGib) }}
{{- end }}
{{- if lt (float64 $v.head.memoryGib) (addf (float64 (include "raydix.shmGib" $v.head.storeGib)) 2.0) }}
{{- fail (printf "head.memoryGib is %v, too little for /dev/shm (storeGib and a tenth) and 2 for Ray" $v.head.memoryGib) }}
{{- end }}
{{- end }}

{{- define "raydix.checkVolumes" -}}
{{- $volumes := .Values.volumes }}
{{- if and $volumes.models.hostPath $volumes.models.claim }}
{{- fail "volumes.models: give hostPath or claim, not both" }}
{{- end }}
{{- if and $volumes.disk.storageClass $volumes.disk.claim }}
{{- fail "volumes.disk: give storageClass or claim, not both" }}
{{- end }}
{{- if and .Values.cache.diskGib $volumes.disk.claim (ne .Values.upgrade.type "None") }}
{{- fail "volumes.disk.claim needs upgrade.type None: one manager at a time may use the folder, so the one of a second cluster would not start" }}
{{- end }}
{{- end }}

{{- define "raydix.checkUpgrade" -}}
{{- if eq .Values.upgrade.type "NewClusterWithIncrementalUpgrade" }}
{{- if not .Values.upgrade.gatewayClass }}
{{- fail "upgrade.gatewayClass is needed for NewClusterWithIncrementalUpgrade: KubeRay makes a Gateway of that class" }}
{{- end }}
{{- if not .Values.autoscaling.enabled }}
{{- fail "autoscaling.enabled is needed for NewClusterWithIncrementalUpgrade" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "raydix.checkHttp" -}}
{{- range $kind := list "ingress" "gateway" }}
{{- $front := index $.Values.http $kind }}
{{- if $front.enabled }}
{{- if not $front.host }}{{ fail (printf "http.%s.host is needed" $kind) }}{{ end }}
{{- if not (or $front.tlsSecret (and $front.parent $front.parent.name)) }}
{{- fail (printf "http.%s.tlsSecret is needed: keys of tenants travel as plain text" $kind) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.http.gateway }}
{{- if and .enabled (not .className) (not .parent.name) }}
{{- fail "http.gateway needs className, for a Gateway of its own, or parent.name" }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the chart derives from its own values, and has checked, is not given a second time. */}}
{{- define "raydix.checkOverrides" -}}
{{- $own := dict "model" (list "name" "source") "cache" (list "pool_gib" "segment_gib" "swap_gib" "disk_gib" "disk_path") "batches" (list "gib" "folder") }}
{{- range $section, $keys := $own }}
{{- range $key := $keys }}
{{- if hasKey (get $.Values.overrides $section | default dict) $key }}
{{- fail (printf "overrides.%s.%s: the chart has a value of its own for it" $section $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.tenants.secret (or (hasKey .Values.overrides "tenants") (hasKey .Values.overrides "tenants_file")) }}
{{- fail "overrides: tenants come from tenants.secret, or stand in overrides, not both" }}
{{- end }}
{{- if hasKey .Values.overrides "workers" }}
{{- fail "overrides.workers: use worker of pools.prefill, decode, mixed or elastic" }}
{{- end }}
{{- end }}
