#!/usr/bin/env pwsh
# Drains an application before an event of its VM, approves the event, and resumes afterwards.
# PowerShell 7, nothing else. Run it on a real VM, here or on Azure; dot-source it to test it.
Set-StrictMode -Version Latest
$ErrorActionPreference = 'Stop'
$EventsPath = '/metadata/scheduledevents?api-version=2020-07-01'
$NamePath = '/metadata/instance/compute/name?api-version=2021-02-01&format=text'

# Without a name, it is read from the endpoint. It is the name in Resources, not the hostname.
function New-Handler([string] $Endpoint, [scriptblock] $Drain, [scriptblock] $Resume, [string] $Name = '') {
    $approved = [System.Collections.Generic.HashSet[string]]::new()
    [pscustomobject]@{
        Endpoint = $Endpoint; Drain = $Drain; Resume = $Resume; Name = $Name; IsDrained = $false; Approved = $approved
    }
}

# Poll once and react. An error changes nothing; the next poll may succeed.
function Invoke-Poll($Handler) {
    if (-not $Handler.Name) {
        $Handler.Name = Invoke-Endpoint $Handler $NamePath
    }
    $document = Invoke-Endpoint $Handler $EventsPath
    # All VMs of an availability set see one document; only events that name this VM count.
    $ours = @($document.Events | Where-Object { $_.Resources -ccontains $Handler.Name })
    if ($ours.Count -eq 0) {
        Resume-Work $Handler
        return
    }
    if (-not $Handler.IsDrained) {
        Write-Host "$($ours[0].EventType) is scheduled, not before '$($ours[0].NotBefore)': draining"
        & $Handler.Drain
        $Handler.IsDrained = $true
    }
    foreach ($scheduled in $ours | Where-Object EventStatus -CEQ 'Scheduled') {
        Approve-Event $Handler $scheduled
    }
}

function Resume-Work($Handler) {
    if ($Handler.IsDrained) {
        & $Handler.Resume
        $Handler.IsDrained = $false
        $Handler.Approved.Clear()
        Write-Host 'the event is over: accepting work again'
    }
}

# Approve only once: an approved event may stay Scheduled until other VMs approve or another update domain is done.
function Approve-Event($Handler, $Scheduled) {
    if ($Handler.Approved.Contains($Scheduled.EventId)) { return }
    $body = ConvertTo-Json -Compress -Depth 5 @{ StartRequests = @(@{ EventId = $Scheduled.EventId }) }
    $null = Invoke-Endpoint $Handler $EventsPath @{ Method = 'Post'; Body = $body; ContentType = 'application/json' }
    $null = $Handler.Approved.Add($Scheduled.EventId)
    Write-Host "approved $($Scheduled.EventType) $($Scheduled.EventId)"
}

# The endpoint is link-local, so no proxy is used. A status other than 200 is an error.
function Invoke-Endpoint($Handler, [string] $Path, [hashtable] $Options = @{}) {
    Invoke-RestMethod -Uri ($Handler.Endpoint + $Path) -Headers @{ Metadata = 'true' } -NoProxy -TimeoutSec 10 @Options
}

if ($MyInvocation.InvocationName -ne '.') {
    # A real application stops accepting requests here, and waits until the open ones are done: Stop-Service, Start-Service
    # `forewarn lab run` sets the second.
    $handler = New-Handler ($env:ENDPOINT ?? $env:FOREWARN_ENDPOINT ?? 'http://169.254.169.254') -Drain { Start-Sleep 5 } -Resume { }
    while ($true) { # ends when it is stopped
        try { Invoke-Poll $handler } catch { Write-Host "no sense to be had of the endpoint: $_" }
        Start-Sleep 1
    }
}
