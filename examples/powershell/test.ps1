#!/usr/bin/env pwsh
# What the handler owes its VM, tested in a lab: events on demand, and a clock that the test moves. Needs forewarn.
# Plain functions; their bodies can move into the It blocks of Pester as they are.
. (Join-Path $PSScriptRoot 'handler.ps1')
$Gone = @{ fault = 'status'; code = 410; vms = @('web-0'); requests = 1 }
$ReadySecondsMax = 30
$Tests = @(
    'Test-ARebootIsApprovedWhenDrainedAndWorkGoesOnWhenItIsOver'
    'Test-WhatBefallsTheNeighbourIsLeftToTheNeighbour'
    'Test-AnEndpointThatIsGoneIsAskedAgainAndIsNoAllClear'
)

function Test-ARebootIsApprovedWhenDrainedAndWorkGoesOnWhenItIsOver {
    $id = Start-Maintenance host-a
    $done = [System.Collections.Generic.List[string]]::new()
    $handler = New-Handler $Door { $done.Add("drained while $(Get-Seen $id)") } { $done.Add('resumed') }

    Invoke-Look $handler
    Assert-Equal 'drained while Scheduled' ($done -join ', ')
    Assert-Equal 'Started, approved by web-0' (Get-Seen $id)

    Step-Clock (15 * 60)
    Assert-Equal 'completed' (Get-Seen $id)
    Invoke-Look $handler
    Assert-Equal 'drained while Scheduled, resumed' ($done -join ', ')
}

function Test-WhatBefallsTheNeighbourIsLeftToTheNeighbour {
    $id = Start-Maintenance host-b
    $done = [System.Collections.Generic.List[string]]::new()

    Invoke-Look (New-Handler $Door { $done.Add('drained') } { $done.Add('resumed') })
    Assert-Equal 'Scheduled' (Get-Seen $id)
    Assert-Equal '' ($done -join ', ')

    Step-Clock (15 * 60)
    Assert-Equal 'Started' (Get-Seen $id)
}

function Test-AnEndpointThatIsGoneIsAskedAgainAndIsNoAllClear {
    $id = Start-Maintenance host-a
    $done = [System.Collections.Generic.List[string]]::new()
    $handler = New-Handler $Door { $done.Add('drained') } { $done.Add('resumed') }

    $null = Invoke-Api Post /faults $Gone
    Assert-Throws { Invoke-Look $handler }
    Invoke-Look $handler
    Assert-Equal 'Started, approved by web-0' (Get-Seen $id)

    $null = Invoke-Api Post /faults $Gone
    Assert-Throws { Invoke-Look $handler }
    Assert-Equal 'drained' ($done -join ', ')
}

function Assert-Equal([string] $Expected, [string] $Got) {
    if ($Got -cne $Expected) { throw "expected '$Expected', got '$Got'" }
}

function Assert-Throws([scriptblock] $Action) {
    try { & $Action } catch { return }
    throw 'a 410 was not noticed'
}

# The host below some VMs is to be rebooted; the id of the event of the web servers.
function Start-Maintenance([string] $Below) {
    $answer = Invoke-Api Post "/hosts/$Below/maintain" @{ type = 'Reboot' }
    ($answer.events | Where-Object scope -CEQ 'web').id
}

# An event as the platform sees it, in a few words.
function Get-Seen([string] $Id) {
    $seen = Invoke-Api Get "/events/$Id"
    if ($seen.PSObject.Properties['facts']) { return $seen.facts.how }
    if ($seen.approvals.Count -eq 0) { return $seen.status }
    "$($seen.status), approved by $($seen.approvals -join ' ')"
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

# The lab is a child process; where it is stands in its ready file, and what it can do in docs/lab.md.
$ready = Join-Path ([System.IO.Path]::GetTempPath()) "lab-$PID.json"
$flags = 'lab', 'serve', '--port=0', '--control-port=0', "--ready-file=$ready"
$process = Start-Process forewarn -ArgumentList $flags -PassThru -RedirectStandardOutput "$ready.log"
$failures = 0
try {
    for ($waited = [System.Diagnostics.Stopwatch]::StartNew(); -not (Test-Path $ready); Start-Sleep -Milliseconds 50) {
        if ($process.HasExited -or $waited.Elapsed.TotalSeconds -gt $ReadySecondsMax) { throw 'the lab did not start' }
    }
    $Lab = Get-Content -Raw $ready | ConvertFrom-Json
    $Door = $Lab.vms.'web-0' # whoever calls there is web-0
    foreach ($test in $Tests) {
        try {
            & $test
            Write-Host "ok     $test"
        } catch {
            $failures++
            Write-Host "FAILED ${test}: $_"
        }
        Step-Clock 3600 # whatever a test began is over
    }
} finally {
    if (-not $process.HasExited) { $process.Kill() }
    $process.WaitForExit()
    Remove-Item -ErrorAction Ignore $ready, "$ready.log"
}
exit [int]($failures -gt 0)
