// Drains an application before an event of its VM, approves the event, and resumes afterwards.
// Needs only the base libraries of .NET or mono. Main runs it on a real VM, here or on Azure.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Net.Http;
using System.Runtime.Serialization;
using System.Runtime.Serialization.Json;
using System.Text;
using System.Threading;

[DataContract]
public class Event
{
    [DataMember] public string EventId { get; set; }
    [DataMember] public string EventStatus { get; set; }
    [DataMember] public string EventType { get; set; }
    [DataMember] public string NotBefore { get; set; }
    [DataMember] public string[] Resources { get; set; }
}

[DataContract]
public class Document
{
    [DataMember(IsRequired = true)] public Event[] Events { get; set; }
}

public class Handler
{
    private const string EventsPath = "/metadata/scheduledevents?api-version=2020-07-01";
    private const string NamePath = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";

    // The endpoint is link-local, so no proxy can reach it.
    private static readonly HttpClient Client =
        new HttpClient(new HttpClientHandler { UseProxy = false }) { Timeout = TimeSpan.FromSeconds(10) };

    private readonly string endpoint;
    private readonly Action drain;
    private readonly Action resume;
    private readonly HashSet<string> approved = new HashSet<string>();
    private string name;
    private bool isDrained;

    /// <summary>Without a name, it is read from the endpoint. It is the name in Resources, not the hostname.</summary>
    public Handler(string endpoint, Action drain, Action resume, string name = null)
    {
        this.endpoint = endpoint;
        this.drain = drain;
        this.resume = resume;
        this.name = name;
    }

    /// <summary>Poll once and react. An exception changes nothing; the next poll may succeed.</summary>
    public void Poll()
    {
        name = name ?? Send(HttpMethod.Get, NamePath);
        // All VMs of an availability set see one document; only events that name this VM count.
        var ours = Json.Read<Document>(Send(HttpMethod.Get, EventsPath)).Events.Where(item => item.Resources.Contains(name)).ToList();
        if (ours.Count > 0 && !isDrained)
        {
            Console.WriteLine($"{ours[0].EventType} is scheduled, not before '{ours[0].NotBefore}': draining");
            drain();
            isDrained = true;
        }
        foreach (var scheduled in ours.Where(item => item.EventStatus == "Scheduled"))
        {
            Approve(scheduled);
        }
        if (ours.Count == 0 && isDrained)
        {
            resume();
            isDrained = false;
            approved.Clear();
            Console.WriteLine("the event is over: accepting work again");
        }
    }

    // Approve only once: an approved event may stay Scheduled until other VMs approve or another update domain is done.
    private void Approve(Event scheduled)
    {
        if (approved.Contains(scheduled.EventId)) return;
        Send(HttpMethod.Post, EventsPath, "{\"StartRequests\": [{\"EventId\": \"" + scheduled.EventId + "\"}]}");
        approved.Add(scheduled.EventId);
        Console.WriteLine($"approved {scheduled.EventType} {scheduled.EventId}");
    }

    private string Send(HttpMethod method, string path, string body = null)
    {
        using (var request = new HttpRequestMessage(method, endpoint + path))
        {
            request.Headers.Add("Metadata", "true");
            request.Content = body == null ? null : new StringContent(body, Encoding.UTF8, "application/json");
            using (var response = Client.SendAsync(request).GetAwaiter().GetResult())
            {
                return response.EnsureSuccessStatusCode().Content.ReadAsStringAsync().GetAwaiter().GetResult();
            }
        }
    }

    public static void Main()
    {
        var endpoint = Environment.GetEnvironmentVariable("ENDPOINT")
            ?? Environment.GetEnvironmentVariable("FOREWARN_ENDPOINT") // `forewarn lab run` sets it
            ?? "http://169.254.169.254";
        // A real application stops accepting requests here, and waits until the open ones are done.
        var handler = new Handler(endpoint, drain: () => Thread.Sleep(5000), resume: () => { });
        while (true) // until the process is stopped
        {
            try
            {
                handler.Poll();
            }
            catch (Exception error) when (
                error is HttpRequestException || error is OperationCanceledException || error is SerializationException)
            {
                Console.WriteLine($"poll failed: {error.Message}");
            }
            Thread.Sleep(1000);
        }
    }
}

public static class Json
{
    private static readonly DataContractJsonSerializerSettings Settings =
        new DataContractJsonSerializerSettings { UseSimpleDictionaryFormat = true };

    public static T Read<T>(string text)
    {
        using (var stream = new MemoryStream(Encoding.UTF8.GetBytes(text)))
        {
            return (T)new DataContractJsonSerializer(typeof(T), Settings).ReadObject(stream);
        }
    }
}
