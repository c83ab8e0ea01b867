{{/* What the chart's values are in raydix's configuration; `overrides` has the rest. The result has two parts: `live`,
keys that apply in place and so go into each deployment's user_config, and `args`, the others: Serve makes the version of
all deployments of the application's args, so that a change there restarts everything. live.json says which key is which;
`make manifests` makes it of the table in configs/changes.py. */}}
{{- define "raydix.overrides" -}}
{{- $v := .Values }}
{{- $cache := dict "pool_gib" $v.cache.poolGib "segment_gib" $v.cache.segmentGib "swap_gib" $v.cache.swapGib "disk_gib" $v.cache.diskGib }}
{{- if $v.cache.diskGib }}{{ $_ := set $cache "disk_path" "/var/lib/raydix/kv" }}{{ end }}
{{- $batches := dict "gib" 0 }}
{{- if $v.volumes.batches.claim }}{{ $batches = dict "folder" "/var/lib/raydix/batches" }}{{ end }}
{{- $workers := dict }}
{{- range $role := (include "raydix.roles" . | fromJson).roles }}
{{- $pool := index $v.pools $role }}
{{- $numbers := include "raydix.numbers" $pool | fromJson }}
{{- $worker := dict "replicas" ($numbers.min | int) }}
{{- if eq $role "elastic" }}{{ $worker = dict "min_replicas" ($numbers.min | int) "max_replicas" ($numbers.max | int) }}{{ end }}
{{- if gt (int $pool.gpus) 0 }}
{{- $worker = merge $worker (dict "device" "cuda" "num_cpus" 1 "num_gpus" $pool.gpus) }}
{{- else }}
{{- $worker = merge $worker (dict "device" "cpu" "num_threads" (max 1 (floor $pool.cpu | int))) }}
{{- end }}
{{- $_ := set $workers $role (mergeOverwrite $worker (deepCopy $pool.worker)) }}
{{- end }}
{{- $derived := dict "model" (dict "name" $v.model.name "source" $v.model.source) "cache" $cache "batches" $batches }}
{{- $all := mergeOverwrite (deepCopy $v.overrides) $derived }}
{{- /* The file that these are merged into has mixed workers where there is no prefill pool. */ -}}
{{- if not (or $v.pools.prefill.enabled $v.pools.mixed.enabled) }}{{ $_ := set $workers "mixed" nil }}{{ end }}
{{- $_ := set $all "workers" $workers }}
{{- $table := .Files.Get "live.json" | fromJson }}
{{- $args := dict }}
{{- $live := dict }}
{{- range $section, $values := $all }}
{{- $isLive := get $table $section }}
{{- if eq $section "workers" }}
{{- $pools := dict }}
{{- $livePools := dict }}
{{- range $role, $pool := $values }}
{{- $_ := set $pools $role $pool }}
{{- if $pool }}
{{- $_ := set $pools $role (include "raydix.keys" (dict "of" $pool "among" $isLive "wanted" false) | fromJson) }}
{{- $_ := set $livePools $role (include "raydix.keys" (dict "of" $pool "among" $isLive "wanted" true) | fromJson) }}
{{- end }}
{{- end }}
{{- $_ := set $args $section $pools }}
{{- $_ := set $live $section $livePools }}
{{- else if kindIs "map" $values }}
{{- with include "raydix.keys" (dict "of" $values "among" $isLive "wanted" false) | fromJson }}{{ $_ := set $args $section . }}{{ end }}
{{- with include "raydix.keys" (dict "of" $values "among" $isLive "wanted" true) | fromJson }}{{ $_ := set $live $section . }}{{ end }}
{{- else }}
{{- $_ := set (ternary $live $args (hasKey $table $section)) $section $values }}
{{- end }}
{{- end }}
{{- /* In args, though it applies in place: a Serve config that has lost its user_config lets nobody in. */ -}}
{{- if $v.tenants.secret }}{{ $_ := set $args "tenants_file" "/etc/raydix/tenants/tenants.yaml" }}{{ end }}
{{- dict "args" $args "live" $live | toJson }}
{{- end }}

{{/* The keys of a section that are, or are not, among others. */}}
{{- define "raydix.keys" -}}
{{- $found := dict }}
{{- range $key, $value := .of }}
{{- if eq (has $key ($.among | default list)) $.wanted }}{{ $_ := set $found $key $value }}{{ end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* The Serve config: each deployment, and the pods that its replicas go to. */}}
{{- define "raydix.serveConfig" -}}
{{- $v := .Values }}
{{- $times := include "raydix.times" . | fromJson }}
{{- $overrides := include "raydix.overrides" . | fromJson }}
{{- $userConfig := toYaml $overrides.live | indent 10 }}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: raydix
    import_path: raydix.serve_app:build
    route_prefix: /
    args:
      config: {{ include "raydix.config" . }}
      overrides:
        {{- toYaml $overrides.args | nindent 8 }}
    runtime_env:
      env_vars:
        TOKENIZERS_PARALLELISM: "false"
    deployments:
      - name: kv_cache_manager
        num_replicas: 1
        user_config:
{{ $userConfig }}
        placement_group_bundles:
          - CPU: {{ $v.pools.ingress.managerCpu }}
        placement_group_bundle_label_selector:
          - raydix-role: ingress
        graceful_shutdown_timeout_s: {{ $times.worker }}
      {{- range $role := (include "raydix.roles" . | fromJson).roles }}
      {{- $pool := index $v.pools $role }}
      - name: {{ $role }}
        {{- if ne $role "elastic" }}
        num_replicas: {{ $pool.replicas }}
        {{- else }}
        # As in actors/scaling.py; the bounds stand here, where a change restarts nothing.
        num_replicas: auto
        autoscaling_config:
          min_replicas: {{ $pool.replicas.min }}
          max_replicas: {{ $pool.replicas.max }}
          {{- if eq (int $pool.replicas.min) 0 }}
          initial_replicas: 1
          {{- end }}
          metrics_interval_s: 2.0
          look_back_period_s: 10.0
          upscale_delay_s: 0.0
          downscale_delay_s: 0.0
          policy:
            policy_function: raydix.actors.scaling:number_of_workers
        {{- end }}
        user_config:
{{ $userConfig }}
        placement_group_bundles:
          {{- if gt (int $pool.gpus) 0 }}
          - CPU: 2
            GPU: {{ $pool.gpus }}
          {{- else }}
          - CPU: {{ ceil $pool.cpu }}
          {{- end }}
        placement_group_bundle_label_selector:
          - raydix-role: {{ $role }}
        graceful_shutdown_timeout_s: {{ $times.worker }}
      {{- end }}
      - name: ingress
        num_replicas: auto
        autoscaling_config:
          min_replicas: {{ $v.pools.ingress.replicas.min }}
          max_replicas: {{ $v.pools.ingress.replicas.max }}
          target_ongoing_requests: {{ $v.pools.ingress.replicas.target }}
        user_config:
{{ $userConfig }}
        ray_actor_options:
          num_cpus: {{ $v.pools.ingress.replicaCpu }}
          label_selector:
            raydix-role: ingress
        graceful_shutdown_timeout_s: {{ $times.stream }}
{{- end }}
