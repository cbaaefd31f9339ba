// A lab as a child process: where it is stands in its ready file, and what it can do in docs/lab.md.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Linq;
using System.Net.Http;
using System.Runtime.Serialization;
using System.Text;
using System.Threading;

public sealed class Lab : IDisposable
{
    private const int ReadySecondsMax = 30;

    private readonly HttpClient client = new HttpClient(new HttpClientHandler { UseProxy = false });
    private readonly string ready = Path.GetTempFileName();
    private readonly Process process;
    private readonly Ready told;

    public Lab()
    {
        File.Delete(ready);
        process = Process.Start(new ProcessStartInfo("forewarn", $"lab serve --port=0 --control-port=0 --ready-file={ready}")
        {
            UseShellExecute = false,
            RedirectStandardOutput = true, // a few lines, for people
        });
        for (var waited = Stopwatch.StartNew(); !File.Exists(ready); Thread.Sleep(50))
        {
            if (process.HasExited || waited.Elapsed.TotalSeconds > ReadySecondsMax)
            {
                Dispose();
                throw new Exception("the lab did not start");
            }
        }
        told = Json.Read<Ready>(File.ReadAllText(ready));
    }

    /// <summary>Whoever calls there is that VM.</summary>
    public string Door(string vm) => told.vms[vm];

    /// <summary>The host below some VMs is to be rebooted; the id of the event of the web servers.</summary>
    public string Maintain(string host) =>
        Json.Read<Answer>(Api("POST", $"/hosts/{host}/maintain", "{\"type\": \"Reboot\"}")).events.Single(one => one.scope == "web").id;

    /// <summary>An event as the platform sees it, in a few words.</summary>
    public string Event(string id)
    {
        var seen = Json.Read<Seen>(Api("GET", "/events/" + id));
        if (seen.facts != null) return seen.facts.how;
        return seen.approvals.Length == 0 ? seen.status : $"{seen.status}, approved by {string.Join(" ", seen.approvals)}";
    }

    public void Advance(int seconds) => Api("POST", "/clock/advance", "{\"seconds\": " + seconds + "}");

    public string Api(string method, string path, string body = null)
    {
        var request = new HttpRequestMessage(new HttpMethod(method), $"{told.control}/api/v1{path}");
        request.Content = body == null ? null : new StringContent(body, Encoding.UTF8, "application/json");
        return client.SendAsync(request).GetAwaiter().GetResult().Content.ReadAsStringAsync().GetAwaiter().GetResult();
    }

    public void Dispose()
    {
        if (!process.HasExited) process.Kill();
        process.WaitForExit();
        File.Delete(ready);
    }

    [DataContract]
    private class Ready
    {
        [DataMember] public string control;
        [DataMember] public Dictionary<string, string> vms;
    }

    [DataContract]
    private class Answer
    {
        [DataMember] public Seen[] events;
    }

    [DataContract]
    private class Facts
    {
        [DataMember] public string how;
    }

    [DataContract]
    private class Seen
    {
        [DataMember] public string id;
        [DataMember] public string scope;
        [DataMember] public string status;
        [DataMember] public string[] approvals;
        [DataMember] public Facts facts;
    }
}
