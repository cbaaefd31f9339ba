// A lab as a child process. Its ready file has the URLs; docs/lab.md has the API.
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
    private readonly Ready urls;

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
        urls = Json.Read<Ready>(File.ReadAllText(ready));
    }

    /// <summary>Requests to this URL come from that VM.</summary>
    public string Endpoint(string vm) => urls.vms[vm];

    /// <summary>Schedule a reboot of a host. Returns the id of the event for the web servers.</summary>
    public string Maintain(string host) =>
        Json.Read<Response>(Api("POST", $"/hosts/{host}/maintain", "{\"type\": \"Reboot\"}")).events.Single(item => item.scope == "web").id;

    /// <summary>An event in the control API, as text.</summary>
    public string Event(string id)
    {
        var found = Json.Read<ControlEvent>(Api("GET", "/events/" + id));
        if (found.facts != null) return found.facts.how;
        return found.approvals.Length == 0 ? found.status : $"{found.status}, approved by {string.Join(" ", found.approvals)}";
    }

    public void Advance(int seconds) => Api("POST", "/clock/advance", "{\"seconds\": " + seconds + "}");

    public string Api(string method, string path, string body = null)
    {
        var request = new HttpRequestMessage(new HttpMethod(method), $"{urls.control}/api/v1{path}");
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
    private class Response
    {
        [DataMember] public ControlEvent[] events;
    }

    [DataContract]
    private class Facts
    {
        [DataMember] public string how;
    }

    [DataContract]
    private class ControlEvent
    {
        [DataMember] public string id;
        [DataMember] public string scope;
        [DataMember] public string status;
        [DataMember] public string[] approvals;
        [DataMember] public Facts facts;
    }
}
