{{- define "raydix.mounts" -}}
{{- $v := .root.Values }}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
{{- if $v.tenants.secret }}
- {name: tenants, mountPath: /etc/raydix/tenants, readOnly: true}
{{- end }}
{{- if ne .role "head" }}
- {name: models, mountPath: /var/lib/raydix/models}
{{- end }}
{{- if eq .role "ingress" }}
{{- if $v.cache.diskGib }}
- {name: disk, mountPath: /var/lib/raydix/kv}
{{- end }}
{{- if $v.volumes.batches.claim }}
- {name: batches, mountPath: /var/lib/raydix/batches}
{{- end }}
{{- end }}
{{- end }}

{{- define "raydix.volumes" -}}
{{- $v := .root.Values }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ include "raydix.shmGib" .pool.storeGib }}Gi}
- name: tmp
  emptyDir: {sizeLimit: {{ $v.volumes.tmpGib }}Gi}
{{- if $v.tenants.secret }}
# Read where the application is built, which may be on any pod.
- name: tenants
  secret: {secretName: {{ $v.tenants.secret }}}
{{- end }}
{{- if ne .role "head" }}
- name: models
  {{- with $v.volumes.models }}
  {{- if .hostPath }}
  hostPath: {path: {{ .hostPath }}, type: Directory}
  {{- else if .claim }}
  persistentVolumeClaim: {claimName: {{ .claim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .gib }}Gi}
  {{- end }}
  {{- end }}
{{- end }}
{{- if eq .role "ingress" }}
{{- if $v.cache.diskGib }}
- name: disk
  {{- include "raydix.disk" .root | trim | nindent 2 }}
{{- end }}
{{- if $v.volumes.batches.claim }}
- name: batches
  persistentVolumeClaim: {claimName: {{ $v.volumes.batches.claim }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "raydix.disk" -}}
{{- $size := printf "%sGi" (include "raydix.diskGib" .) }}
{{- with .Values.volumes.disk }}
{{- if .claim }}
persistentVolumeClaim: {claimName: {{ .claim }}}
{{- else if .storageClass }}
ephemeral:
  volumeClaimTemplate:
    spec:
      accessModes: [ReadWriteOnce]
      storageClassName: {{ .storageClass }}
      resources:
        requests: {storage: {{ $size }}}
{{- else }}
emptyDir: {sizeLimit: {{ $size }}}
{{- end }}
{{- end }}
{{- end }}
