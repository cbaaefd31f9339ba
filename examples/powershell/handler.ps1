#!/usr/bin/env pwsh
# Keeps an application out of the way of what happens to its VM: it drains before it says "go ahead".
# PowerShell 7, nothing else. Run it on a real VM, here or on Azure; dot-source it to test it.
Set-StrictMode -Version Latest
$ErrorActionPreference = 'Stop'
$EventsPath = '/metadata/scheduledevents?api-version=2020-07-01'
$NamePath = '/metadata/instance/compute/name?api-version=2021-02-01&format=text'

# The name is asked for if it is not given. It is the one that Resources have, not the hostname.
function New-Handler([string] $Endpoint, [scriptblock] $Drain, [scriptblock] $Resume, [string] $Name = '') {
    $approved = [System.Collections.Generic.HashSet[string]]::new()
    [pscustomobject]@{
        Endpoint = $Endpoint; Drain = $Drain; Resume = $Resume; Name = $Name; IsDrained = $false; Approved = $approved
    }
}

# One look at what is to come, and what follows from it. After an error nothing is concluded: the next look may succeed.
function Invoke-Look($Handler) {
    if (-not $Handler.Name) {
        $Handler.Name = Invoke-Endpoint $Handler $NamePath
    }
    $document = Invoke-Endpoint $Handler $EventsPath
    # All VMs of an availability set see one document; what counts is whether our name is in it.
    $ours = @($document.Events | Where-Object { $_.Resources -ccontains $Handler.Name })
    if ($ours.Count -eq 0) {
        Resume-Work $Handler
        return
    }
    if (-not $Handler.IsDrained) {
        Write-Host "$($ours[0].EventType) ahead, not before '$($ours[0].NotBefore)': draining"
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
        Write-Host 'it is over: taking work again'
    }
}

# Once: an approved event may still have to wait, for its turn or for the word of others.
function Approve-Event($Handler, $Scheduled) {
    if ($Handler.Approved.Contains($Scheduled.EventId)) { return }
    $body = ConvertTo-Json -Compress -Depth 5 @{ StartRequests = @(@{ EventId = $Scheduled.EventId }) }
    $null = Invoke-Endpoint $Handler $EventsPath @{ Method = 'Post'; Body = $body; ContentType = 'application/json' }
    $null = $Handler.Approved.Add($Scheduled.EventId)
    Write-Host "approved $($Scheduled.EventType) $($Scheduled.EventId)"
}

# No proxy knows the endpoint. An answer other than 200 is an error.
function Invoke-Endpoint($Handler, [string] $Path, [hashtable] $Options = @{}) {
    Invoke-RestMethod -Uri ($Handler.Endpoint + $Path) -Headers @{ Metadata = 'true' } -NoProxy -TimeoutSec 10 @Options
}

if ($MyInvocation.InvocationName -ne '.') {
    # A real application closes its doors here, and waits until what it has in hand is done: Stop-Service, Start-Service
    # `forewarn lab run` sets the second.
    $handler = New-Handler ($env:ENDPOINT ?? $env:FOREWARN_ENDPOINT ?? 'http://169.254.169.254') -Drain { Start-Sleep 5 } -Resume { }
    while ($true) { # ends when it is stopped
        try { Invoke-Look $handler } catch { Write-Host "no sense to be had of the endpoint: $_" }
        Start-Sleep 1
    }
}
