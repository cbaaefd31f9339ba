#!/usr/bin/env pwsh
# Tests the handler in a lab: events on demand, and a clock that the test moves. Needs forewarn.
# Plain functions; their bodies can move into the It blocks of Pester as they are.
. (Join-Path $PSScriptRoot 'handler.ps1')
$Gone = @{ fault = 'status'; code = 410; vms = @('web-0'); requests = 1 }
$ReadySecondsMax = 30
$Tests = @(
    'Test-RebootIsApprovedAfterDrainingAndWorkResumesAfterwards'
    'Test-EventsOfAnotherVmAreIgnored'
    'Test-FailedPollIsRetriedAndDoesNotEndTheEvent'
)

function Test-RebootIsApprovedAfterDrainingAndWorkResumesAfterwards {
    $id = Start-Maintenance host-a
    $done = [System.Collections.Generic.List[string]]::new()
    $handler = New-Handler $Endpoint { $done.Add("drained while $(Get-Event $id)") } { $done.Add('resumed') }

    Invoke-Poll $handler
    Assert-Equal 'drained while Scheduled' ($done -join ', ')
    Assert-Equal 'Started, approved by web-0' (Get-Event $id)

    Step-Clock (15 * 60)
    Assert-Equal 'completed' (Get-Event $id)
    Invoke-Poll $handler
    Assert-Equal 'drained while Scheduled, resumed' ($done -join ', ')
}

function Test-EventsOfAnotherVmAreIgnored {
    $id = Start-Maintenance host-b
    $done = [System.Collections.Generic.List[string]]::new()

    Invoke-Poll (New-Handler $Endpoint { $done.Add('drained') } { $done.Add('resumed') })
    Assert-Equal 'Scheduled' (Get-Event $id)
    Assert-Equal '' ($done -join ', ')

    Step-Clock (15 * 60)
    Assert-Equal 'Started' (Get-Event $id)
}

function Test-FailedPollIsRetriedAndDoesNotEndTheEvent {
    $id = Start-Maintenance host-a
    $done = [System.Collections.Generic.List[string]]::new()
    $handler = New-Handler $Endpoint { $done.Add('drained') } { $done.Add('resumed') }

    $null = Invoke-Api Post /faults $Gone
    Assert-Throws { Invoke-Poll $handler }
    Invoke-Poll $handler
    Assert-Equal 'Started, approved by web-0' (Get-Event $id)

    $null = Invoke-Api Post /faults $Gone
    Assert-Throws { Invoke-Poll $handler }
    Assert-Equal 'drained' ($done -join ', ')
}

function Assert-Equal([string] $Expected, [string] $Got) {
    if ($Got -cne $Expected) { throw "expected '$Expected', got '$Got'" }
}

function Assert-Throws([scriptblock] $Action) {
    try { & $Action } catch { return }
    throw 'a 410 was not noticed'
}

# Schedule a reboot of a host. Returns the id of the event for the web servers.
function Start-Maintenance([string] $HostName) {
    $response = Invoke-Api Post "/hosts/$HostName/maintain" @{ type = 'Reboot' }
    ($response.events | Where-Object scope -CEQ 'web').id
}

# An event in the control API, as text.
function Get-Event([string] $Id) {
    $found = Invoke-Api Get "/events/$Id"
    if ($found.PSObject.Properties['facts']) { return $found.facts.how }
    if ($found.approvals.Count -eq 0) { return $found.status }
    "$($found.status), approved by $($found.approvals -join ' ')"
}

function Step-Clock([int] $Seconds) {
    $null = Invoke-Api Post /clock/advance @{ seconds = $Seconds }
}

function Invoke-Api([string] $Method, [string] $Path, [hashtable] $Body) {
    $options = @{ Method = $Method; Uri = "$($Lab.control)/api/v1$Path"; NoProxy = $true; SkipHttpErrorCheck = $true }
    if ($Body) {
        $options.Body = ConvertTo-Json -Compress $Body
        $options.ContentType = 'application/json'
    }
    Invoke-RestMethod @options
}

# The lab is a child process. Its ready file has the URLs; docs/lab.md has the API.
$ready = Join-Path ([System.IO.Path]::GetTempPath()) "lab-$PID.json"
$flags = 'lab', 'serve', '--port=0', '--control-port=0', "--ready-file=$ready"
$process = Start-Process forewarn -ArgumentList $flags -PassThru -RedirectStandardOutput "$ready.log"
$failures = 0
try {
    for ($waited = [System.Diagnostics.Stopwatch]::StartNew(); -not (Test-Path $ready); Start-Sleep -Milliseconds 50) {
        if ($process.HasExited -or $waited.Elapsed.TotalSeconds -gt $ReadySecondsMax) { throw 'the lab did not start' }
    }
    $Lab = Get-Content -Raw $ready | ConvertFrom-Json
    $Endpoint = $Lab.vms.'web-0' # requests to this URL come from web-0
    foreach ($test in $Tests) {
        try {
            & $test
            Write-Host "ok     $test"
        } catch {
            $failures++
            Write-Host "FAILED ${test}: $_"
        }
        Step-Clock 3600 # end the events of the test
    }
} finally {
    if (-not $process.HasExited) { $process.Kill() }
    $process.WaitForExit()
    Remove-Item -ErrorAction Ignore $ready, "$ready.log"
}
exit [int]($failures -gt 0)
